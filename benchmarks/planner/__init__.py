"""What `shoal plan` predicts, beside what happens."""
