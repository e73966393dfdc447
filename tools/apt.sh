# apt_install PACKAGE...: as root, or through sudo; says what it does. Sourced by the other scripts.
# shellcheck shell=bash

apt_install() {
  local root=()
  command -v apt-get >/dev/null || { echo "install: missing: $*; this machine has no apt-get, install them by hand" >&2; return 1; }
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || { echo "install: missing: $*; install them as root (apt-get install $*)" >&2; return 1; }
    root=(sudo)
  fi
  echo "install: apt-get install $*" >&2
  "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -qq &&
    "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}
