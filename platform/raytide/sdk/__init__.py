"""The Python SDK behind `import raytide`."""
