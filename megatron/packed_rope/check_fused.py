def run(rope):
    return []
