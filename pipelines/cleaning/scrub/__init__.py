"""Steps that change a document: personal data, secrets and licence headers."""
