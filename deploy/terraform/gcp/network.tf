# Nodes have addresses of their own for what they download. Nothing may reach them but the head and each other, by their account.

resource "google_compute_network" "cluster" {
  name                    = var.name
  auto_create_subnetworks = false
}

resource "google_compute_subnetwork" "nodes" {
  name                     = var.name
  network                  = google_compute_network.cluster.id
  region                   = var.region
  ip_cidr_range            = var.cidr
  private_ip_google_access = true # the bucket, without leaving Google's network
}

resource "google_compute_firewall" "within" {
  name                    = "${var.name}-within"
  network                 = google_compute_network.cluster.id
  source_service_accounts = [google_service_account.head.email, google_service_account.node.email]
  target_service_accounts = [google_service_account.head.email, google_service_account.node.email]
  allow {
    protocol = "all" # Ray opens many ports between nodes
  }
}

resource "google_compute_firewall" "operators" {
  name                    = "${var.name}-operators"
  network                 = google_compute_network.cluster.id
  source_ranges           = var.operators
  target_service_accounts = [google_service_account.head.email]
  allow {
    protocol = "tcp"
    ports    = ["22"]
  }
}
