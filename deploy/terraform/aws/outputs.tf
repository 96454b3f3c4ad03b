output "cluster_yaml" {
  description = "The parts of cluster.yaml that name what is here; merge them into each node type's node_config."
  value = yamlencode({
    cluster_name = var.name
    provider = {
      type              = "aws"
      region            = var.region
      availability_zone = join(",", var.zones)
    }
    head_node_config = {
      IamInstanceProfile = { Arn = aws_iam_instance_profile.head.arn }
      SubnetIds          = [for subnet in aws_subnet.nodes : subnet.id]
      SecurityGroupIds   = [aws_security_group.nodes.id, aws_security_group.operators.id]
    }
    node_config = {
      IamInstanceProfile = { Arn = aws_iam_instance_profile.node.arn }
      SubnetIds          = [for subnet in aws_subnet.nodes : subnet.id]
      SecurityGroupIds   = [aws_security_group.nodes.id]
    }
  })
}

output "bucket" {
  description = "Where `out` of datasets and `init_from` of runs may lie."
  value       = "s3://${aws_s3_bucket.data.id}"
}

output "state_url" {
  description = "metadata.raytide.state_url, once the user `head` is made (docs/providers.md) and PASSWORD replaced by its password."
  value       = var.database ? "postgresql://head:PASSWORD@${aws_db_instance.state[0].endpoint}/raytide?sslmode=require" : ""
}

output "state_secret" {
  description = "The secret of the master's password, which changes every week: it is for making the user `head` alone."
  value       = var.database ? aws_db_instance.state[0].master_user_secret[0].secret_arn : ""
}
