"""Bad inputs and faults, drawn at random: does every command and every call keep its promises? `benchmarks.faults`."""
