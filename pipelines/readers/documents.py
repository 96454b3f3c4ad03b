"""Readers for files that each contain one document: text, HTML (its main content) and PDF (the text of its pages)."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from raytide.core.specs.data import ReaderName
from raytide.pipelines.readers.base import Drop, InputFile, InputPart, ReadOptions, Record, open_input
from raytide.pipelines.readers.conversation import text_of


@dataclass(frozen=True, slots=True)
class DocumentReader:
    """Reads a file that contains one document. `record_in` extracts the text from the file's bytes."""

    name: ReaderName
    record_in: Callable[[bytes], Record] = bytes

    def split(self, file: InputFile, options: ReadOptions) -> list[InputPart]:
        return [InputPart(file.url, file.size, file.version, self.name)]

    def read(self, part: InputPart, options: ReadOptions) -> Iterator[Record]:
        with open_input(part.url) as stream:
            yield self.record_in(stream.read())


@dataclass(frozen=True, slots=True)
class LinkReader:
    """Reads a symbolic link that leads to no file. The link counts as one dropped record, so that it appears in the
    manifest.
    """

    def split(self, file: InputFile, options: ReadOptions) -> list[InputPart]:
        return [InputPart(file.url, file.size, file.version, "link")]

    def read(self, part: InputPart, options: ReadOptions) -> Iterator[Record]:
        yield Drop("link", "it does not lead to a file")


def html_record(page: bytes) -> Record:
    """Returns the main content of a web page, without navigation and boilerplate.

    The page is decoded from the encoding that it declares, or that it seems to have.
    """
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.encoding import bytes_to_str, detect_encoding

    return text_of(extract_plain_text(bytes_to_str(page, detect_encoding(page) or "utf-8"), main_content=True))


def pdf_record(body: bytes) -> Record:
    """Returns the text of a PDF, or a Drop if it cannot be read. The library can read many broken PDFs, because it
    guesses.
    """
    import logging

    from pypdf import PdfReader as Pdf

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it warns of every oddity of a file
    try:
        text = "\n".join(page.extract_text() for page in Pdf(io.BytesIO(body)).pages)
    except Exception as error:  # the library raises errors of every kind for a broken file
        return Drop("not_pdf", f"{type(error).__name__}: {error}")
    return text_of(text.encode("utf-8", "replace"))
