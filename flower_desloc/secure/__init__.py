"""Secure aggregation: the server learns the sums of the sites' streams, and no site's own.

Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine Learning", in its
variant for an active adversary: a mask shared by each pair of sites, which cancels in the sum, and
one of each site's own, whose seed the others hold shares of; signed keys, and a signed list of the
sites that are in the sum. ``site.SiteSum`` and ``server.ServerSum`` are the two ends. They know
nothing of Flower, and ``flower_desloc.flower.secure`` connects them to it.

Of our own there is only the protocol: X25519, HKDF, AES, ChaCha20-Poly1305, SHA-256 and Ed25519 are
those of ``cryptography``, and Shamir's shares those of PyCryptodome.
"""
