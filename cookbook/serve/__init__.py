"""The session server: a core (sessions, order, tenants, usage, storage), HTTP, and an adapter for each wire format."""
