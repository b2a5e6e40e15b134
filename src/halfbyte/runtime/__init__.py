"""What this machine has and what can run on it; imports no torch by itself."""
