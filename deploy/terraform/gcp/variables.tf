variable "name" {
  description = "The cluster_name of cluster.yaml."
  type        = string
  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,21}$", var.name))
    error_message = "Use at most 22 small letters, digits and hyphens, a letter first: accounts are named after it."
  }
}

variable "project" {
  description = "The project of the whole cluster."
  type        = string
}

variable "region" {
  description = "The region of the whole cluster."
  type        = string
}

variable "zone" {
  description = "The zone in which nodes are bought: Ray's provider for GCP sees one."
  type        = string
}

variable "cidr" {
  description = "The addresses of the nodes."
  type        = string
  default     = "10.20.0.0/20"
}

variable "operators" {
  description = "The address ranges that may reach the head by ssh. Everything else goes through that tunnel."
  type        = list(string)
  validation {
    condition     = !contains(var.operators, "0.0.0.0/0")
    error_message = "Name the addresses of your office or VPN, not all of them."
  }
}

variable "database" {
  description = "Keep the state in PostgreSQL, which outlives the head, in place of a file on its disk."
  type        = bool
  default     = true
}

variable "database_tier" {
  description = "The machine of the database."
  type        = string
  default     = "db-custom-1-3840"
}
