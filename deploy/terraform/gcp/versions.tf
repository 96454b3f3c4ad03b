terraform {
  required_version = ">= 1.6"
  required_providers {
    google = {
      source  = "hashicorp/google"
      version = "~> 6.0"
    }
  }
}

provider "google" {
  project        = var.project
  region         = var.region
  default_labels = { "raytide-cluster" = var.name }
}
