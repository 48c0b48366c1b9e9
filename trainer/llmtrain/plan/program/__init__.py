"""The program of a step: what a rank computes, gathers, reduces and sends, in which order and in which memory."""
