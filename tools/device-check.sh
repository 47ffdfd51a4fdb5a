#!/bin/sh
# Checks the CUDA backend on a machine with an NVIDIA GPU, in under 4 minutes. Nothing is built there:
#
#     cargo build --release -p powerinfer-cuda --example device_check
#     tools/device-check.sh target/release/examples/device_check
#
# Takes the program, and the longest time in seconds (240). `device_check --rehearse` tries goldens and budgets on the emulator.
set -u
program=${1:?usage: tools/device-check.sh PROGRAM [SECONDS]}
limit=${2:-240}
began=$(date +%s)
left() { echo $((limit - $(date +%s) + began)); }

command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
timeout "$(left)" "$program" || exit 1
if command -v compute-sanitizer >/dev/null; then
    # Slow: what it finds in the time that is left. 124 is the end of the time.
    for tool in memcheck racecheck; do
        [ "$(left)" -gt 20 ] || { echo "$tool                 not run, out of time"; continue; }
        timeout "$(($(left) / 2))" compute-sanitizer --tool $tool --error-exitcode 9 "$program" --conformance >/tmp/device-check.$$ 2>&1
        case $? in
            0) echo "$tool                 ok" ;;
            124) grep -q "========= .*\(Invalid\|hazard\|Race\)" /tmp/device-check.$$ && { cat /tmp/device-check.$$; exit 1; }
                 echo "$tool                 nothing found when the time ended" ;;
            *) cat /tmp/device-check.$$; exit 1 ;;
        esac
    done
    rm -f /tmp/device-check.$$
else
    echo "compute-sanitizer       not on this machine"
fi
