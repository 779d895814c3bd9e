"""What every folder may use: errors, messages, files and values of others. Nothing here knows of training."""
