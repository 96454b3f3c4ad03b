output "cluster_yaml" {
  description = "The parts of cluster.yaml that name what is here; merge them into each node type's node_config."
  value = yamlencode({
    cluster_name = var.name
    provider = {
      type              = "gcp"
      project_id        = var.project
      region            = var.region
      availability_zone = var.zone
    }
    head_node_config = {
      serviceAccounts   = [{ email = google_service_account.head.email, scopes = ["https://www.googleapis.com/auth/cloud-platform"] }]
      networkInterfaces = [{ subnetwork = google_compute_subnetwork.nodes.self_link, accessConfigs = [{ type = "ONE_TO_ONE_NAT", name = "External NAT" }] }]
    }
    node_config = {
      serviceAccounts   = [{ email = google_service_account.node.email, scopes = ["https://www.googleapis.com/auth/cloud-platform"] }]
      networkInterfaces = [{ subnetwork = google_compute_subnetwork.nodes.self_link, accessConfigs = [{ type = "ONE_TO_ONE_NAT", name = "External NAT" }] }]
    }
  })
}

output "bucket" {
  description = "Where `out` of datasets and `init_from` of runs may lie."
  value       = "gs://${google_storage_bucket.data.name}"
}

output "state_url" {
  description = "metadata.raytide.state_url, once PASSWORD is replaced by the one that you set."
  value       = var.database ? "postgresql://raytide:PASSWORD@${google_sql_database_instance.state[0].private_ip_address}/raytide?sslmode=require" : ""
}
