"""Claims about speed, each with a file that anybody can run again."""
