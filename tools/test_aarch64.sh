#!/usr/bin/env bash
# The tests of the crates with kernels, built for 64-bit Arm and run by an emulator of such a CPU. It gives results,
# not speed. For Debian on x86-64; neither root nor rustup's targets are needed.
#
#     tools/test_aarch64.sh [FOLDER] [-- CARGO-TEST-ARGUMENTS]
#
# FOLDER   keeps what is downloaded (a compiler with a standard library for Arm, a linker, the emulator: about
#          200 MB, unpacked 1 GB) and what is built, for the next time; a temporary one if none is given.
#
# After `--`: instead of `test -p powerinfer-sparse-ops -p powerinfer-cpu --lib`, say
# `test -p powerinfer-cpu --test contracts`, or `clippy` and its arguments.
#
# Debian's security archive has a newer Rust than its release, also for Arm: the packages `rustc-web` and
# `libstd-rust-web-dev`. Cargo is the one that is installed; compiler and library are of one version and from there.
set -euo pipefail
cd "$(dirname "$0")/.."

target=aarch64-unknown-linux-gnu
release="$(. /etc/os-release && echo "${VERSION_CODENAME:-}")"
if [ "$(uname -m)" != x86_64 ] || [ "$(. /etc/os-release && echo "$ID")" != debian ]; then
    echo "this script is for Debian on x86-64; on an Arm machine run: cargo test"
    exit 2
fi

if [ $# -gt 0 ] && [ "$1" != -- ]; then
    mkdir -p "$1"
    folder="$(realpath "$1")"
    shift
else
    folder="$(mktemp -d)"
    trap 'rm -rf "$folder"' EXIT
fi
[ "${1:-}" != -- ] || shift
[ $# -gt 0 ] || set -- test -p powerinfer-sparse-ops -p powerinfer-cpu --lib

root="$folder/root"
libs="$root/usr/lib/x86_64-linux-gnu"

# Lists and packages of its own, so that the machine's stay as they are; what the machine has is not fetched again.
apt() {
    apt-get -qq -o Debug::NoLocking=1 -o APT::Sandbox::User= -o APT::Architectures=amd64,arm64 \
        -o Dir::State="$folder/apt" -o Dir::State::status=/var/lib/dpkg/status -o Dir::Cache="$folder/apt" \
        -o Dir::Etc::sourcelist="$folder/apt/sources.list" -o Dir::Etc::sourceparts=/dev/null \
        -o Dir::Etc::preferencesparts=/dev/null "$@"
}

if [ ! -f "$folder/complete" ]; then
    rm -rf "$folder/apt" "$root"
    mkdir -p "$folder/apt/lists/partial" "$folder/apt/archives/partial" "$root"
    printf 'deb http://deb.debian.org/debian %s main\ndeb http://deb.debian.org/debian-security %s-security main\n' \
        "$release" "$release" > "$folder/apt/sources.list"
    apt update
    # With all that they need.
    apt install --download-only --yes --no-install-recommends \
        rustc-web libstd-rust-web-dev gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user
    # Without, since its root would be a whole system.
    (cd "$folder/apt/archives" && apt download libstd-rust-web-dev:arm64)
    for package in "$folder"/apt/archives/*.deb; do
        dpkg-deb -x "$package" "$root"
    done
    rm -f "$folder"/apt/archives/*.deb
    touch "$folder/complete"
fi

# The compiler of the folder with its libraries; linker and emulator look for Arm's in the folder as well.
mkdir -p "$folder/bin"
write_tool() {
    printf '#!/bin/sh\nLD_LIBRARY_PATH="%s" exec "%s" %s "$@"\n' "$libs" "$2" "${3:-}" > "$folder/bin/$1"
    chmod +x "$folder/bin/$1"
}
write_tool rustc "$root/usr/bin/rustc"
write_tool rustdoc "$root/usr/bin/rustdoc"
write_tool gcc "$root/usr/bin/aarch64-linux-gnu-gcc" "--sysroot=$root"
write_tool run "$root/usr/bin/qemu-aarch64" "-cpu max -L $root/usr/aarch64-linux-gnu"

export RUSTC="$folder/bin/rustc" RUSTDOC="$folder/bin/rustdoc"
export CARGO_TARGET_DIR="$folder/target"
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER="$folder/bin/gcc"
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="$folder/bin/run"
cargo "$1" --target "$target" "${@:2}"
