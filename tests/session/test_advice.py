"""Messages are parsed into commands and the text between them, and formatted unchanged."""

import pytest

from awsddp.session.advice import parse_message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("awsddp down && awsddp up   # anew", "awsddp -c a down && awsddp -c b up   # anew"),
        ("awsddp up; awsddp logs 'a b'", "awsddp -c a up; awsddp -c a logs 'a b'"),
        ("awsddp down   # end it; then awsddp up", "awsddp -c a down   # end it; then awsddp -c b up"),
        ("awsddp up   # start it; then awsddp down", "awsddp -c a up   # start it; then awsddp -c a down"),
        ("see awsddp jobs, or wait", "see awsddp -c a jobs, or wait"),
        ("awsddp -c other up", "awsddp -c other up"),
        ("aws s3 ls\nawsddp fetch", "aws s3 ls\nawsddp -c a fetch"),
    ],
)
def test_options_are_added_to_each_command_and_other_text_is_unchanged(text: str, expected: str) -> None:
    advice = parse_message(text)
    assert "\n".join(map(str, advice)) == text
    assert "\n".join(str(line.with_options(["-c", "a"], ["-c", "b"])) for line in advice) == expected
