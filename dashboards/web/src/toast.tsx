// What was just copied, at the lower edge, told to screen readers too.
import { useEffect, useState } from "preact/hooks";

let show: (text: string, what: string) => void = () => {};
export const announce = (text: string, what: string) => show(text, what);

export function Toast() {
  const [shown, setShown] = useState<{ text: string; what: string } | null>(null);
  useEffect(() => {
    let timer = 0;
    show = (text, what) => {
      clearTimeout(timer);
      setShown({ text, what });
      timer = setTimeout(() => setShown(null), 3500);
    };
  }, []);
  return (
    <div class={`toast ${shown ? "shown" : ""}`} role="status">
      {shown && (
        <>
          <code>{shown.text}</code>
          <span>{shown.what}</span>
        </>
      )}
    </div>
  );
}
