# The head buys and ends machines of its own cluster only, and gives them the role of nodes. Nodes read and write the bucket.

data "aws_iam_policy_document" "machines" {
  statement {
    actions = ["sts:AssumeRole"]
    principals {
      type        = "Service"
      identifiers = ["ec2.amazonaws.com"]
    }
  }
}

resource "aws_iam_role" "head" {
  name               = "${var.name}-head"
  assume_role_policy = data.aws_iam_policy_document.machines.json
}

resource "aws_iam_instance_profile" "head" {
  name = "${var.name}-head"
  role = aws_iam_role.head.name
}

resource "aws_iam_role" "node" {
  name               = "${var.name}-node"
  assume_role_policy = data.aws_iam_policy_document.machines.json
}

resource "aws_iam_instance_profile" "node" {
  name = "${var.name}-node"
  role = aws_iam_role.node.name
}

data "aws_iam_policy_document" "head" {
  statement {
    sid       = "Look"
    actions   = ["ec2:DescribeInstances", "ec2:DescribeSubnets", "ec2:DescribeSpotPriceHistory"]
    resources = ["*"] # EC2 takes no resources for them
  }
  statement {
    sid       = "BuyMachinesOfThisCluster"
    actions   = ["ec2:RunInstances"]
    resources = ["arn:aws:ec2:${var.region}:*:instance/*"]
    condition {
      test     = "StringEquals"
      variable = "aws:RequestTag/ray-cluster-name"
      values   = [var.name]
    }
  }
  statement {
    sid     = "BuyThemHere"
    actions = ["ec2:RunInstances"]
    resources = concat(
      [for subnet in aws_subnet.nodes : subnet.arn],
      [aws_security_group.nodes.arn],
      [for kind in ["network-interface", "volume", "key-pair", "spot-instances-request"] : "arn:aws:ec2:${var.region}:*:${kind}/*"],
      ["arn:aws:ec2:${var.region}::image/*"],
    )
  }
  statement {
    sid       = "NameWhatItBuys"
    actions   = ["ec2:CreateTags"]
    resources = ["arn:aws:ec2:${var.region}:*:instance/*", "arn:aws:ec2:${var.region}:*:volume/*"]
    condition {
      test     = "StringEquals"
      variable = "ec2:CreateAction"
      values   = ["RunInstances"]
    }
  }
  statement {
    sid       = "ChangeAndEndMachinesOfThisCluster"
    actions   = ["ec2:CreateTags", "ec2:TerminateInstances"]
    resources = ["arn:aws:ec2:${var.region}:*:instance/*"]
    condition {
      test     = "StringEquals"
      variable = "aws:ResourceTag/ray-cluster-name"
      values   = [var.name]
    }
  }
  statement {
    sid       = "GiveThemTheRoleOfNodes"
    actions   = ["iam:PassRole"]
    resources = [aws_iam_role.node.arn]
  }
}

resource "aws_iam_role_policy" "head" {
  name   = "machines"
  role   = aws_iam_role.head.id
  policy = data.aws_iam_policy_document.head.json
}

data "aws_iam_policy_document" "bucket" {
  statement {
    actions   = ["s3:ListBucket", "s3:ListBucketMultipartUploads"]
    resources = [aws_s3_bucket.data.arn]
  }
  statement {
    actions   = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"]
    resources = ["${aws_s3_bucket.data.arn}/*"]
  }
}

resource "aws_iam_role_policy" "bucket" {
  for_each = { head = aws_iam_role.head.id, node = aws_iam_role.node.id }
  name     = "bucket"
  role     = each.value
  policy   = data.aws_iam_policy_document.bucket.json
}
