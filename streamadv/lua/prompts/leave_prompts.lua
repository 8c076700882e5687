-- Prompts whose producers play them no more: they are to be played again under the same try, because nobody has ended
-- it, or their groups have ended, and how is still to be told.
-- KEYS  void, prompt_entries, prompt_again
-- ARGV  'again' or 'ended', nonce of a lease to which there was no answer ('' = none), then of each other prompt: the prompt,
--       its entry as it was read
-- Returns  number of those whose entry was still that
-- include prompts
local left = 0

local function leave(item, entry)
  local try, failures, nonce = read_entry(item)
  if not try or nonce == NOBODY or redis.call('HGET', keys.prompt_entries, item) ~= entry then return end
  left = left + 1
  if ARGV[1] == 'again' then
    play_again(item, try, failures)
  else
    redis.call('HSET', keys.prompt_entries, item, whole(try) .. ' ' .. whole(failures) .. ' ' .. GONE)
  end
end

for i = 3, #ARGV, 2 do leave(ARGV[i], ARGV[i + 1]) end
local flat = ARGV[2] ~= '' and redis.call('HGETALL', keys.prompt_entries) or {}
for i = 1, #flat, 2 do
  if string.match(flat[i + 1], '^%d+ %d+ (%S+)') == ARGV[2] then leave(flat[i], flat[i + 1]) end
end
return left
