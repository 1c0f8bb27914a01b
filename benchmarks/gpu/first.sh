#!/bin/bash
# The first quarter of an hour on a card, command 1: at most 590 s on a fresh machine. What comes back is in $OUT (8 files
# at most). `python -m benchmarks.gpu --plan 15` tells what it does when, and what for.
. "$(dirname "$0")/quarter_hour.sh"

if [ "${REHEARSAL:-0}" != 1 ]; then
  $PYTHON -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$HOME/site" .whl/*.whl || exit 3
  $PYTHON -m compileall -q -j 16 "$HOME/site" autofit benchmarks > /dev/null 2>&1
fi
stamp versions and what they lack
$PYTHON -m autofit doctor --device $DEVICE 2>&1 | tee "$OUT/doctor.log"

if command -v nvidia-smi > /dev/null; then
  nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current,clocks.max.sm,power.limit --format=csv | tee "$OUT/card.csv"
  nvidia-smi --query-gpu=timestamp,clocks.sm,power.draw,temperature.gpu,utilization.gpu,clocks_event_reasons.active --format=csv -lms 500 > "$OUT/clocks.csv" &
  SMI=$!
fi

stamp search
kept $SEARCH "$OUT/search.log" $PYTHON -m autofit search $WORKLOAD --time-limit $SEARCH_LIMIT --no-store --out "$W/search"

stamp configs of a list
[ $DEVICE = cpu ] || PROBES=$((PROBES - SECONDS))
kept $((PROBES + 10)) "$OUT/probes.log" $PYTHON -m benchmarks.gpu.card_probes "$W/probes" $LIST $PROBES --device $DEVICE

[ -z "${SMI:-}" ] || kill "$SMI"
cp "$W/probes/items.jsonl" "$OUT/"
tar czf "$OUT/logs.tgz" -C "$W" --exclude=exports . 2> /dev/null
stamp end
