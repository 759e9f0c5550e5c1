"""Training over slow links: codecs, servers and torch's DDP between two hosts, against no communication at all."""
