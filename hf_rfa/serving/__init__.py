"""Conversations that go on at once, in the terminal and on a server that holds many."""
