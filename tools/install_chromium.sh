#!/usr/bin/env bash
# A headless browser from Debian's packages, for tests/explain/test_browser.py (called by `make test-slow`).
set -euo pipefail
# shellcheck source=tools/apt.sh
source "$(dirname "$0")/apt.sh"

for program in chromium chromium-browser google-chrome google-chrome-stable; do
  ! command -v "$program" >/dev/null || exit 0
done
apt_install chromium fonts-dejavu-core
