"""Plugins: processors of users, whose hooks run in the stages of an engine of their own."""
