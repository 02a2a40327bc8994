"""The session server: one core that knows sessions, order, tenants and money, and adapters that translate wire formats into it."""
