# The head buys and ends machines whose names begin with the cluster's, and gives them the account of nodes. Nodes use the bucket.

resource "google_service_account" "head" {
  account_id   = "${var.name}-head"
  display_name = "raytide ${var.name}: head"
}

resource "google_service_account" "node" {
  account_id   = "${var.name}-node"
  display_name = "raytide ${var.name}: nodes"
}

resource "google_project_iam_custom_role" "look" {
  role_id = replace("${var.name}_look", "-", "_")
  title   = "raytide ${var.name}: look at machines"
  permissions = [
    "compute.instances.get",
    "compute.instances.list",
    "compute.machineTypes.get",
    "compute.zoneOperations.get",
    "compute.zones.get",
  ]
}

resource "google_project_iam_custom_role" "machines" {
  role_id = replace("${var.name}_machines", "-", "_")
  title   = "raytide ${var.name}: buy and end machines"
  permissions = [
    "compute.disks.create",
    "compute.images.useReadOnly",
    "compute.instances.create",
    "compute.instances.delete",
    "compute.instances.setLabels",
    "compute.instances.setMetadata",
    "compute.instances.setServiceAccount",
    "compute.subnetworks.use",
    "compute.subnetworks.useExternalIp",
  ]
}

resource "google_project_iam_member" "look" {
  project = var.project
  role    = google_project_iam_custom_role.look.id
  member  = google_service_account.head.member
}

resource "google_project_iam_member" "machines" {
  project = var.project
  role    = google_project_iam_custom_role.machines.id
  member  = google_service_account.head.member
  condition {
    title      = "of-this-cluster"
    expression = <<-EOT
      !(resource.type in ["compute.googleapis.com/Instance", "compute.googleapis.com/Disk"]) ||
      resource.name.startsWith("projects/${var.project}/zones/${var.zone}/instances/ray-${var.name}-") ||
      resource.name.startsWith("projects/${var.project}/zones/${var.zone}/disks/ray-${var.name}-")
    EOT
  }
}

resource "google_service_account_iam_member" "nodes" {
  service_account_id = google_service_account.node.name
  role               = "roles/iam.serviceAccountUser"
  member             = google_service_account.head.member
}

resource "google_storage_bucket_iam_member" "data" {
  for_each = { head = google_service_account.head.member, node = google_service_account.node.member }
  bucket   = google_storage_bucket.data.name
  role     = "roles/storage.objectUser"
  member   = each.value
}
