"""From a prepared request to its output: sequences, text, streams, traces, logs."""
