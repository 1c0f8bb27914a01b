#!/bin/bash
# The first quarter of an hour on a card, command 2, on the same warm machine: train.py and autofit train beside the
# verified probe of a small model that streams nothing; 170 s.
. "$(dirname "$0")/quarter_hour.sh"

$PYTHON -c "
text = open('examples/data/alice.txt').read()
open('$W/text.txt', 'w').write(text * $TEXTS)"

stamp quick search
kept $QUICK "$OUT/quick.log" $PYTHON -m autofit search $SMALL --fast --no-store --out "$W/quick"

stamp train.py
kept $TRAINING "$OUT/train_py.log" $PYTHON "$W/quick/train.py" --data "$W/text.txt" --steps $STEPS --log-every 1

stamp autofit train
kept $TRAINING "$OUT/autofit_train.log" $PYTHON -m autofit train "$W/quick/result.yaml" --from-scratch --data "$W/text.txt" --steps $STEPS --output "$W/trained"

cp "$W/trained/metrics.jsonl" "$W/quick/result.json" "$OUT/"
stamp end
