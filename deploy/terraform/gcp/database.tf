# The queue, the ledger and the registry, reached from the network of the nodes alone. Set the password of the user `raytide` by hand,
# so that it is no part of Terraform's state.

resource "google_compute_global_address" "database" {
  count         = var.database ? 1 : 0
  name          = "${var.name}-database"
  network       = google_compute_network.cluster.id
  purpose       = "VPC_PEERING"
  address_type  = "INTERNAL"
  prefix_length = 20
}

resource "google_service_networking_connection" "database" {
  count                   = var.database ? 1 : 0
  network                 = google_compute_network.cluster.id
  service                 = "servicenetworking.googleapis.com"
  reserved_peering_ranges = [google_compute_global_address.database[0].name]
}

resource "google_sql_database_instance" "state" {
  count               = var.database ? 1 : 0
  name                = "${var.name}-state"
  database_version    = "POSTGRES_16"
  deletion_protection = true
  depends_on          = [google_service_networking_connection.database]
  settings {
    tier              = var.database_tier
    availability_type = "REGIONAL"
    disk_autoresize   = true
    ip_configuration {
      ipv4_enabled    = false
      private_network = google_compute_network.cluster.id
      ssl_mode        = "ENCRYPTED_ONLY"
    }
    backup_configuration {
      enabled                        = true
      point_in_time_recovery_enabled = true
    }
  }
}

resource "google_sql_database" "state" {
  count    = var.database ? 1 : 0
  name     = "raytide"
  instance = google_sql_database_instance.state[0].name
}
