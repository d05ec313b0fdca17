"""Speed, as a ratio to a plain PyTorch loop of the same mathematics, measured in turns in the same process."""
