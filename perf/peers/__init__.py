"""Other servers of embeddings beside this one: the same model, the same inputs, the same clients, in turns.

- `catalogue.py`: the servers, and the commands that start them.
- `environments.py`: their virtual environments; `pins/` has every version.
- `services/`: programs for servers that are frameworks.
- `dialects.py`: requests to each server, and the decoding of its answers.
- `visits.py`: all measurements of one server in one round.
- `comparison.py`: medians and ratios over the rounds.
- `run.py`: the whole comparison.
"""
