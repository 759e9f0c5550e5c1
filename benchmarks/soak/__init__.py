"""Train for an hour while every few seconds a worker dies, freezes or joins."""
