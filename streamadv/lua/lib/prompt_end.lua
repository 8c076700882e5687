-- The end of a prompt's group, in the stream from which it is carried to the home shard: the last ones are kept, since that
-- one may lose what it was told. An entry is '<group> <outcome> <figures>'. The figures are what its rewards were, where
-- somebody knows them: '<number of rewards>,<mean>,<standard deviation>,<least>,<tokens, 0 = not known>'.
-- KEYS  prompt_ends
local PROMPT_ENDS_KEPT = 4096

local function note_prompt_end(id, outcome, figures)
  if string.sub(id, 1, 7) ~= 'prompt:' then return end
  redis.call('XADD', keys.prompt_ends, 'MAXLEN', '~', PROMPT_ENDS_KEPT, '*', 'end', id .. ' ' .. outcome .. ' ' .. (figures or ''))
end

-- Figures of rewards, which are separated by blanks; '' of none.
local function figures_of(rewards)
  local count, sum, least, squares = 0, 0, math.huge, 0
  for text in string.gmatch(rewards, '%S+') do
    local reward = tonumber(text)
    count, sum, least = count + 1, sum + reward, math.min(least, reward)
  end
  if count == 0 then return '' end
  for text in string.gmatch(rewards, '%S+') do squares = squares + (tonumber(text) - sum / count) ^ 2 end
  return string.format('%d,%.6g,%.6g,%.17g,0', count, sum / count, math.sqrt(squares / count), least)
end
