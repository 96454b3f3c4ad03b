#!/bin/sh
# Builds raytide's image for a device from what is committed: deploy/images/build.sh cpu|cuda|rocm [FOLDER]
# FOLDER (build/image-DEVICE) keeps the wheels and the base, so that the next build is made from the same. docs/images.md.
set -eu
die() { printf 'build.sh: %s\n' "$1" >&2; exit 1; }

device=${1:-}
case $device in
  cpu) minor=3.11 ;;      # Debian 12's Python
  cuda | rocm) minor=3.12 ;; # Ubuntu 24.04's
  *) die "give a device: cpu, cuda or rocm" ;;
esac
cd -- "$(dirname -- "$0")/../.."
folder=${2:-build/image-$device}
python=${PYTHON:-python$minor}
"$python" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$minor')" ||
  die "the image's Python is $minor, so its wheels are collected by one: PYTHON=/path/to/python$minor $0 $*"
command -v buildah >/dev/null || die "buildah is missing (Debian: apt-get install buildah)"
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH
umask 022
mkdir -p "$folder"
folder=$(cd -- "$folder" && pwd)

rm -rf "$folder/source" "$folder"/wheels/raytide-*.whl
mkdir "$folder/source"
git archive HEAD | tar -x -C "$folder/source"
"$python" -m pip wheel --quiet --wheel-dir "$folder/wheels" --find-links "$folder/wheels" --constraint constraints.txt \
  "$folder/source[postgres]"
set -- "$folder"/wheels/raytide-*.whl
version=$(basename "$1" | cut -d - -f 2)
cp "$folder/source/constraints.txt" "$folder/source/deploy/images/sbom.py" "$folder"
chmod 644 "$folder/constraints.txt" "$folder/sbom.py"

if [ "$device" = cpu ] && [ ! -f "$folder/base.tar" ]; then
  command -v mmdebstrap >/dev/null || die "mmdebstrap is missing (Debian: apt-get install mmdebstrap)"
  mmdebstrap --quiet --variant=minbase \
    --include=ca-certificates,gcc,libc6-dev,procps,python3,python3-venv,tini,wget \
    bookworm "$folder/base.part.tar" ${MIRROR:+"$MIRROR"}
  mv "$folder/base.part.tar" "$folder/base.tar"
fi

# build FILE NAME [OPTION...]: one layer, whose files have one time
build() {
  file=$1 name=$2; shift 2
  buildah build --format oci --layers=false --timestamp "$SOURCE_DATE_EPOCH" --file "$folder/source/deploy/images/$file" \
    --iidfile "$folder/id" --tag "$name" "$@" "$folder" >&2
}
build "$device.Containerfile" "localhost/raytide-base:$device"
build Containerfile "localhost/raytide:$device" --pull-never --build-arg "BASE=localhost/raytide-base:$device" \
  --build-arg "SOURCE_DATE_EPOCH=$SOURCE_DATE_EPOCH" --build-arg "VERSION=$version"
rm -rf "$folder/source"
printf 'localhost/raytide:%s %s\n' "$device" "$(cat "$folder/id")"
