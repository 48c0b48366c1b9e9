"""Views of plans: tables, texts, data and figures."""
