"""The shell around the pure core: one thread per worker that owns the transport and the side channel.

driver.py is the loop; source.py and destination.py are the two ends of transfers; mover.py posts and polls;
peers.py and links.py are the remote ranks; sidechannel.py the sockets; events.py what crosses to the engine's thread.
"""
