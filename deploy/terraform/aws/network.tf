# Nodes have public addresses, since they fetch images and packages: a NAT gateway for what they download would cost more than the
# addresses do. Nothing may reach them but the head and each other.

resource "aws_vpc" "cluster" {
  cidr_block           = var.cidr
  enable_dns_support   = true
  enable_dns_hostnames = true
  tags                 = { Name = var.name }
}

resource "aws_internet_gateway" "cluster" {
  vpc_id = aws_vpc.cluster.id
}

resource "aws_subnet" "nodes" {
  for_each                = { for index, zone in var.zones : zone => index }
  vpc_id                  = aws_vpc.cluster.id
  availability_zone       = each.key
  cidr_block              = cidrsubnet(var.cidr, 4, each.value)
  map_public_ip_on_launch = true
  tags                    = { Name = "${var.name}-${each.key}" }
}

resource "aws_route_table" "nodes" {
  vpc_id = aws_vpc.cluster.id
  route {
    cidr_block = "0.0.0.0/0"
    gateway_id = aws_internet_gateway.cluster.id
  }
}

resource "aws_route_table_association" "nodes" {
  for_each       = aws_subnet.nodes
  subnet_id      = each.value.id
  route_table_id = aws_route_table.nodes.id
}

# Checkpoints and datasets go to the bucket without leaving the network, and without a charge for transfer.
resource "aws_vpc_endpoint" "bucket" {
  vpc_id          = aws_vpc.cluster.id
  service_name    = "com.amazonaws.${var.region}.s3"
  route_table_ids = [aws_route_table.nodes.id]
}

resource "aws_security_group" "nodes" {
  name        = "${var.name}-nodes"
  description = "Ray opens many ports between nodes: all are open within the group, none to others."
  vpc_id      = aws_vpc.cluster.id
  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_vpc_security_group_ingress_rule" "within" {
  security_group_id            = aws_security_group.nodes.id
  referenced_security_group_id = aws_security_group.nodes.id
  ip_protocol                  = "-1"
}

resource "aws_vpc_security_group_egress_rule" "out" {
  security_group_id = aws_security_group.nodes.id
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "-1"
}

resource "aws_security_group" "operators" {
  name        = "${var.name}-operators"
  description = "Operators reach the head by ssh."
  vpc_id      = aws_vpc.cluster.id
}

resource "aws_vpc_security_group_ingress_rule" "operators" {
  for_each          = toset(var.operators)
  security_group_id = aws_security_group.operators.id
  cidr_ipv4         = each.value
  from_port         = 22
  to_port           = 22
  ip_protocol       = "tcp"
}
