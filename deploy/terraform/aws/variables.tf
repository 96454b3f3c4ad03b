variable "name" {
  description = "The cluster_name of cluster.yaml."
  type        = string
  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,29}$", var.name))
    error_message = "Use at most 30 small letters, digits and hyphens, a letter first."
  }
}

variable "region" {
  description = "The region of the whole cluster."
  type        = string
}

variable "zones" {
  description = "The zones in which nodes may be bought. More zones reclaim spot machines less often at the same time."
  type        = list(string)
  validation {
    condition     = length(var.zones) >= 2 && length(var.zones) <= 6
    error_message = "Name two to six zones: the database has a standby in another one."
  }
}

variable "cidr" {
  description = "The addresses of the network; each zone gets two sixteenths of them."
  type        = string
  default     = "10.20.0.0/16"
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

variable "database_class" {
  description = "The machine of the database."
  type        = string
  default     = "db.t4g.small"
}
