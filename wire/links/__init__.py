"""Connections between processes: gRPC between orchestrators, their certificates, and proxies.

Nothing is imported here: most processes need no gRPC of ours.
"""
