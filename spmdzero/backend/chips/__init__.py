"""TPU chips as the machine and the compiler know them: presence, torus and compiler flags."""
