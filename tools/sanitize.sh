#!/usr/bin/env bash
# Undefined behavior and data races, looked for by Miri, AddressSanitizer and ThreadSanitizer. Opt-in: it needs a
# nightly toolchain with components that a usual installation lacks, and takes minutes.
#
#     tools/sanitize.sh [miri] [address] [thread]      all three if none is named
#
# miri     powerinfer-gguf and powerinfer-sparse-ops, without mapping files, which Miri cannot do
# address  powerinfer-cpu, with the standard library as it is installed
# thread   powerinfer-cpu, with the standard library built with the sanitizer too. Where its source is missing the
#          installed one is used: the sanitizer does not know its locks then and may report races that are none,
#          such as two of the test harness itself, which are left out
#
# Run so far, with nightly 1.97 of 2026-05-15 on x86-64 with AVX2:
# - `address` to its end, without findings; contracts.rs takes three minutes.
# - `thread` with the installed standard library: the unit tests and backend.rs with findings in the test
#   harness only; contracts.rs was stopped after four minutes, without findings until then.
# - `miri` not at all: it was not installed.
#
# A check whose component is missing says so, and the script then ends with status 2. A finding is status 1.
set -uo pipefail
cd "$(dirname "$0")/.."

toolchain="${SANITIZE_TOOLCHAIN:-nightly}"
target="$(rustc -vV | sed -n 's/^host: //p')"
missing=0
failed=0

step() { printf '\n== %s\n' "$*"; }
lacks() {
    echo "not checked: $1"
    echo "    install it: $2"
    missing=1
}
check() {
    echo "+ $*"
    "$@" || { echo "FAILED: $*"; failed=1; }
}

if ! cargo "+$toolchain" --version > /dev/null 2>&1; then
    lacks "there is no toolchain \`$toolchain\`" "rustup toolchain install $toolchain"
    exit 2
fi
std_source="$(rustc "+$toolchain" --print sysroot)/lib/rustlib/src/rust/library/Cargo.lock"

check_miri() {
    step "Miri: powerinfer-gguf, powerinfer-sparse-ops"
    if ! cargo "+$toolchain" miri --version > /dev/null 2>&1; then
        lacks "Miri is not installed" "rustup component add --toolchain $toolchain miri rust-src"
        return
    fi
    export MIRIFLAGS="${MIRIFLAGS:--Zmiri-disable-isolation}"
    check cargo "+$toolchain" miri test --target-dir target/miri -p powerinfer-gguf --no-default-features --lib
    check cargo "+$toolchain" miri test --target-dir target/miri -p powerinfer-sparse-ops --lib
}

check_address() {
    step "AddressSanitizer: powerinfer-cpu"
    RUSTFLAGS="-Zsanitizer=address" ASAN_OPTIONS="allocator_may_return_null=1" \
        check cargo "+$toolchain" test --target-dir target/asan --target "$target" -p powerinfer-cpu \
        --lib --tests --no-fail-fast
}

check_thread() {
    step "ThreadSanitizer: powerinfer-cpu"
    local flags="-Zsanitizer=thread" build_std="" suppressions
    suppressions="$(mktemp)"
    if [ -f "$std_source" ]; then
        build_std="-Zbuild-std"
    else
        echo "the source of the standard library is not installed, so its locks are not checked"
        echo "    install it: rustup component add --toolchain $toolchain rust-src"
        flags="$flags -Cunsafe-allow-abi-mismatch=sanitizer"
        # What the test harness's threads hand each other.
        printf 'race:%s\n' 'CompletedTest' 'Mutex<core::option::Option<test::run_test' > "$suppressions"
    fi
    # shellcheck disable=SC2086
    RUSTFLAGS="$flags" TSAN_OPTIONS="allocator_may_return_null=1 suppressions=$suppressions" \
        check cargo "+$toolchain" test $build_std --target-dir target/tsan --target "$target" -p powerinfer-cpu \
        --lib --tests --no-fail-fast
    rm -f "$suppressions"
}

for what in ${@:-miri address thread}; do
    case "$what" in
        miri | address | thread) "check_$what" ;;
        *) echo "unknown check \`$what\`: miri, address, thread"; exit 64 ;;
    esac
done
[ "$failed" = 0 ] || exit 1
[ "$missing" = 0 ] || exit 2
echo "no findings"
