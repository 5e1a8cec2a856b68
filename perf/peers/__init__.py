"""Other servers of embeddings beside this one: the same model, the same inputs, the same clients, in turns.

`catalogue.py` says which there are and how each is started, `environments.py` builds what each runs in (`pins/` names
every version of the others'), `services/` holds the programs of those that are frameworks, `dialects.py` is how each is
asked. `visits.py` is one visit to one server, `comparison.py` what several visits come to; `run.py` is the command.
"""
