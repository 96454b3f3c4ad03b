// Asks for the token. It is kept for this tab only, and sent as every client of the API sends it.
import { useEffect, useRef, useState } from "preact/hooks";

import { ApiError, get, token } from "./api";
import { Cmd } from "./ui";

export function Login({ onDone, why }: { onDone: () => void; why: string }) {
  const field = useRef<HTMLInputElement>(null);
  const [error, setError] = useState(why);
  const [isBusy, setBusy] = useState(false);
  useEffect(() => field.current?.focus(), []);

  const submit = async (event: Event) => {
    event.preventDefault();
    const value = field.current!.value.trim();
    if (!value || isBusy) return;
    setBusy(true);
    token.set(value);
    try {
      await get("/v1/status");
      onDone();
    } catch (problem) {
      token.clear();
      const refused = problem instanceof ApiError && problem.status === 401;
      setError(refused ? "This token is not one of this cluster." : (problem as Error).message);
      field.current?.select();
    } finally {
      setBusy(false);
    }
  };
  return (
    <main class="login">
      <form onSubmit={submit}>
        <img src="/page/icon.svg" alt="" />
        <h1>raytide</h1>
        <p>One pool of accelerators: what runs, what waits, what it costs.</p>
        <label for="token">API token</label>
        <input id="token" ref={field} class="field mono" type="password" autocomplete="off" spellcheck={false} required aria-describedby="where" aria-invalid={!!error} />
        {error && (
          <p class="error" role="alert">
            {error}
          </p>
        )}
        <button class="button" disabled={isBusy}>
          {isBusy ? "Signing in…" : "Sign in"}
        </button>
        <p class="hint" id="where">
          <code>raytide token</code> <Cmd run="raytide token" /> prints yours; <code>raytide page</code> <Cmd run="raytide page" /> opens this page signed in. It stays in this tab and is sent to this cluster only.
        </p>
      </form>
    </main>
  );
}
