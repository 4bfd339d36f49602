"""`forewarn demo`: every part as a real process on this machine, and a simulated fleet that says it is one."""
