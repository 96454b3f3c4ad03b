# The queue, the ledger and the registry. The master's password is made and kept by Secrets Manager, and never part of Terraform's state.
# Secrets Manager changes it every seven days, so the cluster is the user `head`, which the operator makes (docs/providers.md).

resource "aws_subnet" "database" {
  for_each          = var.database ? { for index, zone in var.zones : zone => index } : {}
  vpc_id            = aws_vpc.cluster.id
  availability_zone = each.key
  cidr_block        = cidrsubnet(var.cidr, 4, 8 + each.value)
}

resource "aws_db_subnet_group" "state" {
  count      = var.database ? 1 : 0
  name       = var.name
  subnet_ids = [for subnet in aws_subnet.database : subnet.id]
}

resource "aws_security_group" "database" {
  count       = var.database ? 1 : 0
  name        = "${var.name}-database"
  description = "The head reaches the database."
  vpc_id      = aws_vpc.cluster.id
}

resource "aws_vpc_security_group_ingress_rule" "database" {
  count                        = var.database ? 1 : 0
  security_group_id            = aws_security_group.database[0].id
  referenced_security_group_id = aws_security_group.operators.id
  from_port                    = 5432
  to_port                      = 5432
  ip_protocol                  = "tcp"
}

resource "aws_db_instance" "state" {
  count                       = var.database ? 1 : 0
  identifier                  = "${var.name}-state"
  engine                      = "postgres"
  engine_version              = "16"
  instance_class              = var.database_class
  allocated_storage           = 20
  max_allocated_storage       = 200
  storage_encrypted           = true
  db_name                     = "raytide"
  username                    = "raytide"
  manage_master_user_password = true
  db_subnet_group_name        = aws_db_subnet_group.state[0].name
  vpc_security_group_ids      = [aws_security_group.database[0].id]
  multi_az                    = true
  backup_retention_period     = 14
  deletion_protection         = true
  final_snapshot_identifier   = "${var.name}-last"
}
