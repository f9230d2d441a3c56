"""A warm service: models stay loaded, many users ask them over HTTP, rows go to the asker's own store.

    client (a notebook, `mathinterp scan --service`)       service (`mathinterp serve start`)
    run_scan, Dispatcher, store <- place.py, requests.py - HTTP: JSON, Arrow - front.py -> router.py -> host.py (actors)

Whoever asks keeps the run: it cuts the work, hands out shards, retries and writes files, as on a Ray of its own. The
service computes shards and answers with their rows. It writes into no store, and unpickles nothing that it is sent.
"""
