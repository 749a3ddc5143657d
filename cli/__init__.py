"""How the commands read their arguments, run under Hydra, and report errors. Keys, types and values stand in configs/."""
