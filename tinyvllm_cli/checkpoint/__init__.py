"""What is in a Hugging Face checkpoint: headers, shards, configuration, names. Only `weights` needs torch."""
