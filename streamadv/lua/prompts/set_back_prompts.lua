-- A trainer goes on from a checkpoint that is older than what the run has of these prompts, or newer, as after a server has
-- lost its last writes: what has ended there has ended; all else is to be played, what is in play goes on.
-- KEYS  void, session, prompts, prompt_state, prompt_entries, prompt_again, prompt_given_up
-- fenced by session
-- ARGV  epoch; name, description; branch of the trainer; '1' if the checkpoint is older than what the run has committed;
--       numbers of sources, counters, prompts that were begun and had not ended, prompts that had ended above `next`; `next`
--       of each source; each counter and its value; these prompts
-- Returns  1 if something was set back, else 0
-- include prompts
-- include prompt_state
local name, description, branch, is_older = ARGV[2], ARGV[3], ARGV[4], ARGV[5] == '1'
local sources, counters, begun = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local first = 8  -- the arguments before those of the sources
local following, lost = {}, false
for source = 1, sources do
  following[source] = tonumber(ARGV[first + source])
  lost = lost or number_of('next:' .. source) < following[source]
end
local is_done = redis.call('HGET', keys.prompt_state, 'branch') == branch
if not lost and (is_done or not is_older) then return 0 end

local at = first + sources
local kept, values = {}, {}
for i = 1, counters do values[ARGV[at + 2 * i - 1]] = ARGV[at + 2 * i] end
at = at + 2 * counters
local base = number_of('tries')
for i = 1, begun do kept[ARGV[at + i]] = true end
local flat = redis.call('HGETALL', keys.prompt_entries)
for i = 1, #flat, 2 do
  local source, position = string.match(flat[i], '^(%d+) (%d+)$')
  local is_open = kept[flat[i]] or (source and tonumber(position) >= (following[tonumber(source)] or 0))
  if flat[i + 1] == 'ended' or not is_open then
    redis.call('HDEL', keys.prompt_entries, flat[i])
    redis.call('ZREM', keys.prompt_again, flat[i])
  else
    kept[flat[i]] = nil
  end
end
for i = 1, begun do
  if kept[ARGV[at + i]] then play_again(ARGV[at + i], base, 0) end
end
for i = at + begun + 1, #ARGV do redis.call('HSET', keys.prompt_entries, ARGV[i], 'ended') end

flat = redis.call('HGETALL', keys.prompt_state)
for i = 1, #flat, 2 do
  if string.find(flat[i], ' ', 1, true) then redis.call('HDEL', keys.prompt_state, flat[i]) end
end
for counter, value in pairs(values) do redis.call('HSET', keys.prompt_state, counter, value) end
for source, position in ipairs(following) do redis.call('HSET', keys.prompt_state, 'next:' .. source, whole(position)) end
redis.call('HSET', keys.prompt_state, 'base', whole(base), 'tries', whole(base + 1), 'branch', branch)
redis.call('DEL', keys.prompt_given_up)
redis.call('HSETNX', keys.prompts, name, description)
return 1
