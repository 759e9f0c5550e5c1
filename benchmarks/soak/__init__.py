"""Training for an hour while every few seconds something dies, freezes or joins."""
