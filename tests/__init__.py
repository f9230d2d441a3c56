from mathinterp.startup import search_rarely

search_rarely()  # before conftest.py imports torch
